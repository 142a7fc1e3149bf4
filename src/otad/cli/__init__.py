"""The commands of `otad`, one file each; `otad.cli.main` gathers them."""
