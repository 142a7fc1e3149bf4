"""`python -m otad`, which `torchrun -m otad` starts several times."""

from otad.cli.main import main

if __name__ == "__main__":
    main(prog_name="otad")
