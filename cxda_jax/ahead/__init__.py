"""Programs compiled for accelerators that this machine does not have, and what the compiler tells of them."""
