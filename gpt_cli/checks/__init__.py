"""Check and measure results and the machine."""
