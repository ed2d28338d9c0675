"""Other libraries' calls, answered by ETAP: a module each, with that library's names, shapes and conventions."""
