"""What the scripts of questions share; ``make bench`` runs the scripts beside this folder."""
