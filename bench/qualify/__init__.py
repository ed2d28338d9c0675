"""Qualifies a build on a GPU: random cases, sanitizers, other projects' test suites, the H20 proxy."""
