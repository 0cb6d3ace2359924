"""What is multiplied: sizes, options, data types, matrix formats, and the plan itself."""
