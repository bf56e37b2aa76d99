"""The index of a data set: `evodsp data index` makes it, runs and the doctor open it."""
