"""In which order stages compute: pure, but for the recorder of a real step's timeline."""
