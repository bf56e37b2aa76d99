"""`evodsp data build`: chains are parsed once, in parallel, into a feature store."""
