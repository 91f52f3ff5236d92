"""`python -m mctf` and `torchrun -m mctf`: the same as the command `mctf`."""

from .cli import main

main()
