"""Data whose every byte is verified before use: MNIST digits and the State of the Union addresses."""

from depthlab.data.digits import MNIST, mnist
from depthlab.data.files import DataError, cache_dir
from depthlab.data.texts import Address, Text, addresses, text

__all__ = ["MNIST", "Address", "DataError", "Text", "addresses", "cache_dir", "mnist", "text"]
