"""The comparisons of the paper, carried out run by run and shown beside the paper's values."""
