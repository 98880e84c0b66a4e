"""The short convolution."""
