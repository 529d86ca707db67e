"""Container images: what they are made from, how they are built and tested, which of them this process runs in."""
