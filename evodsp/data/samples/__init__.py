"""From the chains of a set to samples: the draw of chains, and the samples that workers make of them."""
