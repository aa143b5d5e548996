"""The same numbers sooner: how clients are stacked, gradients taken and frozen parts skipped."""
