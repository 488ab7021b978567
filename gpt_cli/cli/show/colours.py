"""The colours of the views: on terminals, on pages and in pictures."""

# Of shares from 0 to 1, over their square root, because most are small: viridis.
SHARES = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
# Lower bounds of bits with their colours: ColorBrewer's OrRd, safe for the colour-blind, and
# a darker red.
BITS = {1: "#fef0d9", 2: "#fdcc8a", 4: "#fc8d59", 8: "#e34a33", 16: "#b30000", 32: "#5c0010"}
# Of values from the most negative, over 0 in the middle, to the most positive: ColorBrewer's RdBu.
SIGNED = ("#b2182b", "#ef8a62", "#f7f7f7", "#67a9cf", "#2166ac")
