"""Real fillings of the ports, one door per foreign package. A filling never imports a driver."""
