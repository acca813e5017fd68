"""The parts that run on a device: a trained model by itself, a buffer of its own images, and
the page that shows what adapting changed."""
