"""Where ranks run on CPUs, in this process or as Ray actors, and how the loss of one is noticed."""
