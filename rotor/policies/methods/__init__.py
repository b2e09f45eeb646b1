"""The methods, one file each: `method: NAME` in a recipe is the class of that name in the module NAME."""
