"""Write features of a model to files, and evaluate them with simple classifiers."""
