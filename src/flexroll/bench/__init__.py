"""One cell of the matrix to one JSON record: inputs, processes, rounds, memory, environment."""
