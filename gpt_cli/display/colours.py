"""The colours of the views: on terminals, on pages and in pictures."""

from collections.abc import Sequence

import numpy as np

# Of shares from 0 to 1, over their square root, because most are small: viridis.
SHARES = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
# Lower bounds of bits with their colours: ColorBrewer's OrRd, safe for the colour-blind, and
# a darker red.
BITS = {1: "#fef0d9", 2: "#fdcc8a", 4: "#fc8d59", 8: "#e34a33", 16: "#b30000", 32: "#5c0010"}
# Of values from the most negative, over 0 in the middle, to the most positive: ColorBrewer's RdBu.
SIGNED = ("#b2182b", "#ef8a62", "#f7f7f7", "#67a9cf", "#2166ac")


def of_bits(bits: float) -> str | None:
    """Return the colour of bits; None for those that have none."""
    return next((colour for bound, colour in reversed(BITS.items()) if bits >= bound), None)


def between(colours: Sequence[str], share: float) -> str:
    """Return the colour at a share from 0 to 1 of the way from the first to the last."""
    position = share * (len(colours) - 1)
    channels = np.array([list(_rgb(colour)) for colour in colours]).T  # red, green and blue
    mixed = [round(np.interp(position, range(len(colours)), channel)) for channel in channels]
    return f"#{bytes(mixed).hex()}"


def ink(colour: str) -> str:
    """Return black or white, whichever has the higher contrast with a colour."""
    light = (np.frombuffer(_rgb(colour), np.uint8) / 255) ** 2.2
    bright = light @ (0.2126, 0.7152, 0.0722) > 0.18  # equal contrast
    return "#000000" if bright else "#ffffff"


def _rgb(colour: str) -> bytes:
    return bytes.fromhex(colour.removeprefix("#"))
