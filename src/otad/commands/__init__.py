"""The commands of `otad`, one file each; `otad.cli` gathers them."""
