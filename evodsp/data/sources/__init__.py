"""Sources of chains: folders, OpenFold's alignment databases, feature stores; and the parsed chain that they give."""
