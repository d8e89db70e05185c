"""What a user asks for: the matrix of a sweep, its settings and its names."""
