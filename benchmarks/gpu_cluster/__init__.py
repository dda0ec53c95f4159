"""The acceptance run of two GPUs or more: layouts, links and failures under every launcher."""
