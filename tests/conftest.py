"""Its presence puts this folder on `sys.path`, so that tests in subfolders can import `training` too."""
