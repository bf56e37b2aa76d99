"""Ranks as processes: started, given their process group, watched, and ended together when one fails."""
