"""`python -m loader view`: photographs and volumes on screen, through the operators being edited.

`core` has what is shown and how it is computed, without a window; `qt` has the window. Nothing
here is imported by `import loader`.
"""
