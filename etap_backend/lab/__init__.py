"""What measures, predicts and checks: needs the extra `lab`. Nothing that a server runs imports it."""
