"""What documents share with each other, and with evaluation texts."""
