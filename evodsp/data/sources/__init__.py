"""Where chains come from: folders, OpenFold's alignment database, feature stores; and what is read of one chain."""
