"""Modules by which transformers finds rotor in a process that never imports it.

`pip install` puts `rotor_autoload` and a `.pth` file that imports it at the root of site-packages (build_backend/);
`rotor run` puts this folder on PYTHONPATH, where Python finds `sitecustomize`. Neither module imports anything of rotor
before transformers is imported.
"""
