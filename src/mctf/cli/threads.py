"""How the threads of a verb behave beside other programs."""

import os


def wait_without_spinning() -> None:
    """Let CPU threads sleep while they wait for each other; to be called before torch is imported.

    Where another program has one of two cores, threads that spin while they wait took 148 s for what took these 23.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
