"""What qualifies a build on a GPU: other projects' tests, random cases, sanitizers, and a model that answers."""
