"""The contract of the user's functions, and how they are named and found."""
