"""The OTAD model: its bank, its answers, and the folder it is saved to."""
