"""The warm start of a writer: what is tried, how, and what of it is kept to train on."""
