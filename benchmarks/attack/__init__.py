"""SIGKILL to random processes of real commands at random times; what is left behind, and whether it can be resumed."""
