"""What passes between machines: messages, frames, identities and the checks of what was sent."""
