"""Several runs beside each other, from their files alone."""
