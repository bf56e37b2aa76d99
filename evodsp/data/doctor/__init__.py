"""`evodsp data doctor`: the faults of a data set, found before training starts."""
