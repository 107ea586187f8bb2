"""NIR: the model as a graph of standard nodes, and a literal runner of such graphs."""
