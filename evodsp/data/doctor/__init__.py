"""`evodsp data doctor`: what is wrong with a data set, before training starts."""
