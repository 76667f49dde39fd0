"""What a user's function must look like, and how it is named and found."""
