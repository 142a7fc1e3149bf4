"""Reports: what a model is, how well it does, and why it says what it says, in one HTML file."""
