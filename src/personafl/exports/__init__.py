"""What leaves a run: model files, cards, ONNX, and which model fits a device."""
