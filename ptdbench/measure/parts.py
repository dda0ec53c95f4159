"""Parts of the time and the memory of a step, in order, and what reports call each."""

#: The phases of a step.
PHASES = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "communication": "exposed communication",
    "stragglers": "waiting for slower ranks",
    "experts": "waiting for the fullest experts",
    "bubble": "pipeline bubble",
    "host": "waiting for the host",
    "optimizer": "optimizer",
    "other": "other",
}

#: What memory is for.
KINDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "communication": "buffers of communication",
    "other": "other memory",
}
