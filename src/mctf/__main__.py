"""`python -m mctf` and `torchrun -m mctf`: the `mctf` command."""

from .cli import main

main()
