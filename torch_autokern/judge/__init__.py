"""Is it right, is it faster: `verdict.screen` and `verdict.judge`."""
