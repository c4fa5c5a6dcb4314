"""Data whose every byte is verified before use: MNIST digits and the State of the Union addresses."""

from depthlab.data.digits import MNIST, fill_cache, mnist
from depthlab.data.files import DataError, cache_dir
from depthlab.data.hub import hub_folder, hub_text
from depthlab.data.texts import Address, Text, addresses, text

__all__ = [
    "MNIST",
    "Address",
    "DataError",
    "Text",
    "addresses",
    "cache_dir",
    "hub_folder",
    "hub_text",
    "mnist",
    "prepare",
    "text",
]


def prepare(full: bool = False) -> list[str]:
    """Verify the bundles and say what there is, one line each; ``depthlab data prepare`` prints them.

    Args:
        full: also make our cache hold the complete MNIST, downloading what is missing or damaged there.

    Raises:
        DataError: a bundle is damaged, or the download failed.
    """
    found = [mnist("train").source, mnist("test").source, text().source]
    if full:
        fill_cache()
        found += [mnist("train", full=True).source, mnist("test", full=True).source]
    return [f"verified  {source}" for source in found]
