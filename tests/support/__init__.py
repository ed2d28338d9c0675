"""What tests share: problems with their poison, the error policy, and steps for the engines' own layers."""
